"""What a page shows, for a paper: its figures as pictures, its tables as CSV and LaTeX."""
