"""An endless set of captioned clips: textured objects that pass each other before a drifting camera."""
