"""What stands beside the core, a folder each: the core never imports it, except by name."""
