"""How fast it is: optimizer steps and polar factors beside torch's, against what the hardware can do."""
