"""What a recipe will cost, where and why, from shape tables alone."""
