"""What is computed: which keys a query sees, partial results, the operations."""
