"""What a user holds: caches, pages and their tables, files."""
