"""Seats: what the name of a model means, the `seats:` section of a recipe, and the engines that it opens."""
