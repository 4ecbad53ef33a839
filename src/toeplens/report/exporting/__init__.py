"""What a page shows, for a paper: figures as pictures, tables as CSV and LaTeX. It reads finished pages alone."""
