"""Public tools for tests."""
