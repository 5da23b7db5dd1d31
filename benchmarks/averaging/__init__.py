"""What compressors and outer loops cost in loss, and save in bytes: see docs/averaging.md."""
