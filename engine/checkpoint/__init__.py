"""Published checkpoints: reads and checks configuration and weights, cuts them for a rank, makes dummies."""
