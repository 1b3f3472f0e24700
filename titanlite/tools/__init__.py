"""Commands of `titanlite` beside training. Training never imports them."""
