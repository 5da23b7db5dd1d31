"""The anchor circuit: unmasked passes, and the priors that are made of them."""
