"""Format numbers and tables for every command."""
