"""What rewrites captured graphs: layouts, passes, and which operators become confpred's."""
