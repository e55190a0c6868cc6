"""The worker's half: Keras's training step, gradients out, parameters in, and the line to the server."""
