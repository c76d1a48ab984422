"""The publish stage: wheels become a release, its notes and the package index."""
