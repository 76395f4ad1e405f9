"""The YAML file: schema, loading, and the rules across sections."""
