"""What a run trains on: recipes (data sets to packed tokens), chunks on disk, and the order of samples.

`recipe` reads documents, `pack` turns them into fixed-length rows stored in hashed chunks, `dataset` reads
those chunks back as batches, `order` says which rows belong to which step.
"""
