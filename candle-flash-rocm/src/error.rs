//! The crate's error. Each message names the wrong value and a remedy.

use std::error::Error as StdError;
use std::fmt;
use std::path::PathBuf;

/// A cause of another type: an I/O error, a damaged archive, a driver's code.
pub type Cause = Box<dyn StdError + Send + Sync>;

/// What can go wrong, below candle's own errors. The kinds are there to be matched; [`Error::in_candle`] finds them in
/// the error that a function for candle's tensors returns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that is invalid for every kernel.
    #[error("{name}: got {found}, wanted {wanted}")]
    #[non_exhaustive]
    Argument {
        /// The argument, as the function names it.
        name: &'static str,
        /// Its value, shape or type.
        found: String,
        /// What the function takes.
        wanted: String,
    },
    /// A valid call for which this crate has no kernel on any GPU.
    #[error("{0}")]
    Unsupported(String),
    /// A kernel that the store of a GPU target lacks.
    #[error(
        "{} has no kernel {kernel} for {target}. Build a store that has it: ./build_rocm.sh --store {target}",
        store.display()
    )]
    #[non_exhaustive]
    MissingKernel {
        /// The kernel's name.
        kernel: String,
        /// The GPU target of the store.
        target: String,
        /// The file of the store.
        store: PathBuf,
    },
    /// A kernel store that is missing, cannot be read, or does not fit the crate.
    #[error("{reason}")]
    #[non_exhaustive]
    Store {
        /// The file, what is wrong with it, and a remedy.
        reason: String,
        /// The error of the file system or of the archive.
        source: Option<Cause>,
    },
    /// The host or the GPU has no memory for a call.
    #[error("{reason}")]
    #[non_exhaustive]
    OutOfMemory {
        /// How many bytes were asked for, what for, and a remedy.
        reason: String,
        /// The driver's code; None for memory of the host.
        source: Option<Cause>,
    },
    /// A tensor, buffer or number of a device that does not fit the others of the call.
    #[error("{0}")]
    WrongDevice(String),
    /// A GPU driver that is missing or refused a call.
    #[error("{reason}")]
    #[non_exhaustive]
    Driver {
        /// The call, the driver's name and text of the error, and a remedy.
        reason: String,
        /// The driver's code; None where no driver was reached.
        source: Option<DriverCode>,
    },
    /// An error of candle.
    #[cfg(feature = "candle")]
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// A result with the crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a GPU driver answered.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverCode {
    /// The number.
    pub code: i32,
    /// The driver's name of the error, such as `hipErrorOutOfMemory`.
    pub name: String,
}

impl fmt::Display for DriverCode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({})", self.name, self.code)
    }
}

impl StdError for DriverCode {}

impl Error {
    /// This crate's error inside an error of candle, or `None`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_flash_rocm::{flash_attn, Error};
    ///
    /// # fn main() -> candle_core::Result<()> {
    /// let q = Tensor::zeros((1, 4, 2, 1024), candle_core::DType::F32, &Device::Cpu)?;
    /// let error = flash_attn(&q, &q, &q, 1., true).unwrap_err();
    /// assert!(matches!(Error::in_candle(&error), Some(Error::Argument { name: "head_dim", .. })));
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "candle")]
    #[must_use]
    pub fn in_candle(error: &candle_core::Error) -> Option<&Self> {
        use candle_core::Error as Candle;
        match error {
            Candle::Io(error) => error.get_ref()?.downcast_ref(),
            Candle::WithBacktrace { inner, .. } | Candle::WithPath { inner, .. } | Candle::Context { inner, .. } => {
                Self::in_candle(inner)
            }
            Candle::WrappedContext { wrapped, .. } => match wrapped.downcast_ref::<candle_core::Error>() {
                Some(inner) => Self::in_candle(inner),
                None => wrapped.downcast_ref(),
            },
            _ => None,
        }
    }

    /// An error about an argument: its name, its value, and what the function takes.
    #[allow(clippy::needless_pass_by_value)] // so that a caller passes a number, a literal or a format! as it is
    pub fn argument(name: &'static str, found: impl ToString, wanted: impl ToString) -> Self {
        Self::Argument { name, found: found.to_string(), wanted: wanted.to_string() }
    }

    /// An error about a kernel store, without a cause.
    pub(crate) fn store(reason: String) -> Self {
        Self::Store { reason, source: None }
    }

    /// An error about a driver that gave no code.
    pub(crate) fn driver(reason: String) -> Self {
        Self::Driver { reason, source: None }
    }
}

#[cfg(feature = "candle")]
impl From<Error> for candle_core::Error {
    /// Wraps the error so that candle prints its message alone and `Error::in_candle` finds it: of candle's variants
    /// with an error inside, `Io` is the one that keeps both.
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(inner) => inner,
            other => Self::from(std::io::Error::other(other)).bt(),
        }
    }
}

/// [`Error::argument`] as a result.
pub(crate) fn argument<T>(name: &'static str, found: impl ToString, wanted: impl ToString) -> Result<T> {
    Err(Error::argument(name, found, wanted))
}
