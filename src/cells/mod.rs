//! Cell metadata.
