"""Export for papers: figures of a page as images, tables as CSV and LaTeX."""
