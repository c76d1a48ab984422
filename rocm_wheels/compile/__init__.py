"""The compile stage: kernel sources become kernel stores, one for each GPU target."""
