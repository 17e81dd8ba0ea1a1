"""The shop as its owners test it."""
