"""Codecs: what crosses a boundary between two stages."""
