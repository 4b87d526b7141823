"""HTTP: routes, connections with bounds, middleware (ids, keys, limits), streamed replies and their resumption,
endpoints for operators."""
