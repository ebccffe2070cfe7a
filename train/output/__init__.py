"""What a run says: rows, figures and reports."""
