"""What pages share: the shell, numbered blocks, panels and their plots, colours."""
