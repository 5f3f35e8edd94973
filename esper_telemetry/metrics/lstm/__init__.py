"""Memory of a recurrent policy: states, gates and sequences."""
