"""Mirror descent over vertices: iterates are drawn from, never released."""
