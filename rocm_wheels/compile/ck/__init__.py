"""The compiler of Composable Kernel."""
