"""World: an endless set of captioned clips with textured objects that pass each other before a drifting camera."""
