"""What a round costs beyond moving its payload, and what hivemind's averager costs on the same tensors and links."""
