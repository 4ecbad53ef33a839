"""Head types: which heads follow position, which follow content, and which known attention patterns they show."""
