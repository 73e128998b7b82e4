"""WHERE a matrix lives: views, names, records; the only code that knows DTensor."""
