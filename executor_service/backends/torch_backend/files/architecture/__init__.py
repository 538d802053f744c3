"""What a model's configuration says of its layers, of all families."""
