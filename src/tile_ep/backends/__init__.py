"""Who moves the rows. `base` says what `Buffer` asks of a backend; backends never import one another."""
