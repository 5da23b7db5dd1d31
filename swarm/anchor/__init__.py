"""The anchor circuit: unmasked passes, the priors made of them, and the corrector that applies those of gradients.

Pure mathematics on named tensors. Who pulls snapshots, when a matrix is factored and how a prior travels is
decided elsewhere.
"""
