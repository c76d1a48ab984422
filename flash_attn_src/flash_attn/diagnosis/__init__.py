"""What an installation is, whether it works, and what to do where it does not."""
