"""Training and inference of a model: loop, loss, optimizer and options of a step."""
