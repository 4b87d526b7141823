"""HTTP interface: connections, middleware, routes, errors, and endpoints for operators."""
