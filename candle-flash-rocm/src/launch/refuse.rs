//! Refusals of options by their names.

use crate::error::{Error, Result};

/// An option by its name, and whether a call uses it.
pub(super) type Used = (&'static str, bool);

/// Refuses the first option that is used.
///
/// # Errors
///
/// With its name and `remedy`.
pub(super) fn refuse(options: &[Used], remedy: &str) -> Result<()> {
    match options.iter().find(|(_, is_used)| *is_used) {
        Some((name, _)) => Err(Error::Unsupported(format!("{name}: {remedy}"))),
        None => Ok(()),
    }
}
