"""The one place that knows all parts: recipe to objects, prepare, train, compare."""
