"""Where two runs that should be equal part: from what they wrote, and from steps done again."""
