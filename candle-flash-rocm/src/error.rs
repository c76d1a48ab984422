//! The crate's error. Each message names what was found and what to do.

/// What can go wrong, below candle's own errors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that no kernel can take.
    #[error("{name}: got {found}, wanted {wanted}")]
    Argument {
        /// The argument, as the function names it.
        name: &'static str,
        /// Its value, shape or type.
        found: String,
        /// What the function takes.
        wanted: String,
    },
    /// A sound call that this crate has no kernel for.
    #[error("{0}")]
    Unsupported(String),
    /// A kernel store that cannot be read, or that lacks what a call needs.
    #[error("{0}")]
    Store(String),
    /// A GPU driver that is missing or that refused; the message has its own name of the error and a remedy.
    #[error("{0}")]
    Driver(String),
    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// A result with the crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(inner) => inner,
            other => Self::wrap(other),
        }
    }
}

/// An error about an argument.
#[allow(clippy::needless_pass_by_value)] // so that a caller passes a number, a literal or a format! as it is
pub(crate) fn argument<T>(name: &'static str, found: impl ToString, wanted: impl ToString) -> Result<T> {
    Err(Error::Argument { name, found: found.to_string(), wanted: wanted.to_string() })
}
