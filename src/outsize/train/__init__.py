"""The loop, the optimisers and their exact resumption."""
