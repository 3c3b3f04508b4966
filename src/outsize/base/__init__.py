"""What every other package may rely on; standard library only."""
