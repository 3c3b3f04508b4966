"""What a person asks for: frozen, strict, hashed, the same in file and memory."""
