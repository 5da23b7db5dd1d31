"""The anchors' priors: memory of clean gradients, their factors, and the corrector that applies them.

Pure mathematics on named tensors. Who pulls snapshots, when a matrix is factored and how a prior travels is
decided elsewhere.
"""
