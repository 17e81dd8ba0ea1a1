"""Every order of events at small size: a search on the real decision functions, and models checked by spin."""
