"""What crosses an averaging round: compressors of gradients."""
