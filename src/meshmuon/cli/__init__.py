"""The `meshmuon` command: each subcommand is one file, `main.py` only collects them."""
