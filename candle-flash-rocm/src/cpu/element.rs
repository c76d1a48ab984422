//! The element types of attention, and a strided view of a tensor's rows.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::launch::Dtype;

/// An element type that the CPU kernels read into and write from `f32`.
pub(crate) trait Element: bytemuck::Pod + Default + Send + Sync {
    /// The type, as the GPU kernels are named.
    const DTYPE: Dtype;
    /// Converts `from` into `to`; both have the same length.
    fn widen(from: &[Self], to: &mut [f32]);
    /// Converts `from` into `to` with one rounding; both have the same length.
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;

    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

macro_rules! half_element {
    ($($Half:ident $DTYPE:ident),*) => {$(
        impl Element for $Half {
            const DTYPE: Dtype = Dtype::$DTYPE;

            fn widen(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }

            fn narrow(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }
        }
    )*};
}
half_element!(f16 F16, bf16 Bf16);

/// Where the elements of a `(batch, row, head, dim)` tensor lie, in elements.
///
/// A packed tensor `(row, head, dim)` has a batch stride of 0. Pages take the place of batch entries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strides {
    pub offset: usize,
    pub batch: usize,
    pub row: usize,
    pub head: usize,
    pub dim: usize,
}

/// A tensor's elements and where its rows lie among them.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, T> {
    pub data: &'a [T],
    pub strides: Strides,
}

/// A tensor whose rows are read as `f32`, so that the kernels are compiled once for all element types.
pub(crate) trait Widened: Sync {
    /// Reads one row of one head into the first `dim` elements of `to`.
    fn read(&self, batch: usize, row: usize, head: usize, to: &mut [f32]);
}

impl<T: Element> View<'_, T> {
    /// Copies one row of one head.
    pub fn copy(&self, batch: usize, row: usize, head: usize, to: &mut [T]) {
        let at = &self.strides;
        let start = at.offset + batch * at.batch + row * at.row + head * at.head;
        if at.dim == 1 {
            to.copy_from_slice(&self.data[start..start + to.len()]);
        } else {
            for (index, value) in to.iter_mut().enumerate() {
                *value = self.data[start + index * at.dim];
            }
        }
    }
}

impl<T: Element> Widened for View<'_, T> {
    fn read(&self, batch: usize, row: usize, head: usize, to: &mut [f32]) {
        let at = &self.strides;
        let start = at.offset + batch * at.batch + row * at.row + head * at.head;
        if at.dim == 1 {
            T::widen(&self.data[start..start + to.len()], to);
        } else {
            for (index, value) in to.iter_mut().enumerate() {
                let place = start + index * at.dim;
                T::widen(&self.data[place..=place], std::slice::from_mut(value));
            }
        }
    }
}
