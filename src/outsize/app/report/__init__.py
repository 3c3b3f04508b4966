"""One page that shows a run, made from its folder alone."""
