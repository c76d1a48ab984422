"""The wheel stage: kernel stores become a wheel, which is repaired and tested."""
