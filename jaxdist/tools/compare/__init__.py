"""Where two runs first differ that should be equal: by what they wrote, and by repeated steps."""
